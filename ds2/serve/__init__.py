"""The server of `ds2 serve`: live recognition for any number of clients, whose audio is decoded in common batches.

engine: batches of whatever has arrived, sessions, metrics. client: an engine as the protocols use it, also one in
another process. protocols: those of clients. http: routes, address, page, and who may use the server. processes:
workers that handle connections, and several recognisers. phrases: hot words as clients send them. limits: what a server
allows, and its errors.
"""
