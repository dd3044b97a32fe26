"""What happens to images between the file and the model."""
