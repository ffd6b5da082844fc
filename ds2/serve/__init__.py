"""The server of `ds2 serve`: live recognition for any number of clients, which share one recogniser's batches.

engine: batches of whatever has arrived, sessions, metrics. protocols: what clients speak. http: routes, address, page,
and who may use the server. processes: workers that speak with clients, and several recognisers. phrases: hot words as
clients send them. limits: what a server allows, and its errors.
"""
