"""Tables larger than the devices' memory: all rows on the host, some cached."""
