"""Where metrics and pictures are sent besides the workdir (`config.trackers`)."""
