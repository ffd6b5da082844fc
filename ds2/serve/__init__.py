"""Live recognition for others: what comes from any number of sources in one batch, and the protocols they speak.

server: routes, and running them. rest, realtime, vosk: a protocol each, on sockets. dispatch: what has arrived is the
next batch. batcher: how protocols ask for it, in this process. workers, worker, links, frames: the same from several
processes; recognisers: several that hear. patience: connections that ask or take nothing. phrases: hot words as clients
give them. page: the page at /. address: where it listens. limits, metrics: what a server allows, and what it counts.
"""
