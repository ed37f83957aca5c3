"""A recording: what a running engine was asked for, as keys and times, for `forebay plan`. No text, no tokens.

It is a folder of parts, one JSON object a line. The newest part of a recording is plain, others are gzipped:

    {"forebay_recording": 1, "recording": "9f…", "part": 3, "block_tokens": 16}   the first line of each part
    {"request": 7, "time_s": 1763208000.25, "input_tokens": 812, "ids": "…"}      a request has come
    {"request": 7, "output_tokens": 64}                                           it has ended
    {"dropped": 2}                                                                so many are not in here

`ids` has eight bytes, little-endian and in base64, for each whole block of the input. Equal ids are
equal prefixes, but only inside of one recording: they are keyed hashes, and the key is never written.
"""

from forebay.recording.recorder import Recorded, Recorder

__all__ = ["Recorded", "Recorder"]
