"""Translation of Keras optimizer and schedule configurations."""
