"""Find out why a training script is slow: where its steps spend their time, and in which lines."""
