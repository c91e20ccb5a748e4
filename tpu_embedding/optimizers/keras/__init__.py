"""Translates the configurations of Keras optimizers and schedules."""
