"""Why a training script is slow: where its steps spend their time, and which lines of it do that."""
