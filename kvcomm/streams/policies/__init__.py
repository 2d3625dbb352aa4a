"""What to cut: policies behind one port.  A choice is data: it goes into the event, and a replay never makes
it again.

============== ====================================================== ===========================
policy         cuts                                                   when
============== ====================================================== ===========================
``Full``       nothing
``WindowFifo`` the oldest blocks behind the protected prefix          after a forward pass
``WholeTurns`` the oldest finished turns                              before the next message
``HeavyHitter`` blocks that got least attention so far (after H2O)    after a forward pass
``Snap``       blocks that the last rows attend least (after SnapKV)  after a forward pass
``RandomBlocks`` any blocks                                           after a forward pass
============== ====================================================== ===========================

``Reprefill`` and ``Summary`` (``restarts``) cut nothing: they begin a new stream with the text that another
policy keeps.
"""
