"""Tables larger than the devices' memory: rows on the host, cached on the devices."""
