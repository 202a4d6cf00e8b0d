"""Names the numbers that captured decode steps keep of each row."""

from enum import IntEnum


class Field(IntEnum):
    """An int64 of each row; the order is that of the rows of `DecodeState`'s memory."""

    TOKEN = 0
    POSITION = 1  # of TOKEN; its key and value are written by the next step
    ALIVE = 2
    START = 3  # position of the prompt's last token
    LAST = 4  # position that draws the last token
    YOUNGEST_STOP = 5  # first position that may draw a stop token
    PROMPT = 6
    SAMPLE = 7
