"""Reads the wire format of protocol buffers, for the few messages that are needed.

A message is a list of fields: a number, a wire type, and a value. What the numbers mean
is the business of the caller.
"""

from collections.abc import Iterator

Field = int | bytes
"""Value of a field: an integer, or the bytes of a string or message."""


def varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns an integer of variable length, and the position behind it.

    Raises:
      ValueError: if the data ends too early, or the integer has more than 64 bits.

    Example:
      >>> varint(bytes([0xAC, 0x02]), 0)
      (300, 2)
    """
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ValueError(f"no integer ends at byte {position}")
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        shift += 7
        if byte < 0x80:
            return value, position


def fields(message: bytes) -> Iterator[tuple[int, Field]]:
    """Yields number and value of each field.

    Raises:
      ValueError: if the bytes are no message.

    Example:
      >>> list(fields(bytes([0x08, 0x05, 0x12, 0x02, 0x61, 0x62])))
      [(1, 5), (2, b'ab')]
    """
    position = 0
    while position < len(message):
        key, position = varint(message, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = varint(message, position)
            yield number, value
            continue
        if wire_type == 2:
            size, position = varint(message, position)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type} of field {number} is unknown")
        data = message[position : position + size]
        position += size
        if len(data) < size:
            raise ValueError(f"field {number} is truncated")
        yield number, data if wire_type == 2 else int.from_bytes(data, "little")


def packed_integers(value: Field) -> list[int]:
    """Returns the integers of one occurrence of a repeated field."""
    if isinstance(value, int):
        return [value]
    integers, position = [], 0
    while position < len(value):
        integer, position = varint(value, position)
        integers.append(integer)
    return integers
