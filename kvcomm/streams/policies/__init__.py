"""What to cut: policies behind one port.  A choice is data: it goes into the event, and a replay never makes
it again.
"""
