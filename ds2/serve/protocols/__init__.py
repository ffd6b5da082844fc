"""The protocols of clients: OpenAI's REST interface, protocols over WebSockets, and Wyoming over TCP.

A protocol of live audio is a `Connection` of `ds2.serve.protocols.websocket`; a table of `ds2.serve.http` gives it its
place.
"""
