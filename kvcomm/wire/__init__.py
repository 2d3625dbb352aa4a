"""The data wire (framed binary messages over TCP and unix sockets) and the control wire's ``.proto``.

``messages`` says what is said, ``frames`` how it is put into bytes; both are pure and shared by the blocking
client, the asyncio servers and the simulator.
"""
