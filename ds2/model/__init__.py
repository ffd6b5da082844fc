"""Features to log-probs: the network as it is trained.

acoustic: the network of the paper's Figure 7. convolution, recurrent, norm: its layers. ragged: sequences of
several lengths. dropout: masks that belong to utterances. pass_context: weights and gradient destinations of
a pass. wavefront: layers side by side. pieces: recurrent layers on pieces of a batch, in training. folded: the network
as it is described for inference. structure: facts of a config, such as lookahead. checkpoint: model files. summary:
`ds2 info`.
"""
