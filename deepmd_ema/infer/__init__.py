"""What a trained model is for: predictions, errors on labelled frames, pictures, a look into its file."""
