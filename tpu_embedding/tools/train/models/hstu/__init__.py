"""HSTU: a sequential transducer over histories, and its layers."""
