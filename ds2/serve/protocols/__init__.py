"""The protocols of clients: OpenAI's REST interface; over WebSockets OpenAI's realtime interface and Vosk's protocol.

A protocol over WebSockets is a `Client` of `ds2.serve.protocols.websocket`; `ds2.serve.http` gives each its route.
"""
