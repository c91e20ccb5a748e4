"""Tables that are larger than the devices' memory."""
