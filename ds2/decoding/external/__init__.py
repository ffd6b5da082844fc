"""Other people's searches behind our interface."""
