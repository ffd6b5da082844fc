"""A step of the optimizer on a GPU: the norm of all gradients in one launch, clipping and update in another.

update  the table of what belongs to each parameter, both launches, and where they can run; torch's optimizer keeps
        the state
"""
