"""Live recognition for others: what comes from any number of sources in one batch, and the protocols they speak.

server: routes and limits. batcher: sessions that are ready, together. rest, realtime, vosk: a protocol each, on
sockets. hot: hot words as clients give them. page: the page at /. limits, metrics: what a server allows, and what it
counts.
"""
