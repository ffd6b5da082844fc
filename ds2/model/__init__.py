"""Features to log-probs.

acoustic: the network of the paper's Figure 7. convolution, recurrent, norm, head: its layers. ragged: sequences of
several lengths. stream_state: what it carries between chunks. blocks: streams in blocks of one shape. folded: layers
whose batch norm is in their weights. folded_module: such a recurrent module, for hearing only. wavefront: layers that
run beside each other, piece by piece. structure: facts of a config, such as lookahead. checkpoint: model files.
summary: `ds2 info`. dropout: masks that belong to utterances. product: with a weight whose gradient has its place.
"""
