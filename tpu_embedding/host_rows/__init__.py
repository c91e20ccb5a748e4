"""Tables larger than device memory: all rows on hosts, some cached on devices."""
