"""The ground: files written whole, tensors with a header, facts of the machine, the one error base. Knows no speech."""
