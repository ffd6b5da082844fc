"""Features to log-probs: the network as it is trained.

acoustic: the network of the paper's Figure 7. convolution, recurrent, norm, dropout: its layers. ragged: lengths of the
utterances of a batch. pass_context: weights and gradient destinations of a pass. wavefront: layers side by side, on
pieces of a batch. structure: facts of a config, such as lookahead, and what a layer sees of its input in time.
checkpoint: model files. shipped: the models that come with ds2.

Each training module describes itself for inference by a method `folded`.
"""
