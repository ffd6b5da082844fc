"""Many ranks as one: the communicator, its transports, gradients on their way, agreement, the watchdog."""
