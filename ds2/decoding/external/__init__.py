"""Other people's searches behind our interface, each in a file; adapter is what they share."""
