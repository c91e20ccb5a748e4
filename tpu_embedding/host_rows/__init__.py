"""Tables larger than device memory. Hosts keep all rows, and devices cache some."""
