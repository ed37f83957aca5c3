"""`make demo`: chats that do not fit on the device, in a real vLLM, without offload, eager and lazy.

workload.py   who asks what: chats about a long text, larger together than the device cache
model.py      a small model on disk: seeded random weights, a tokenizer of bytes
engine.py     one of the three runs, in a process of its own
children.py   starts that process, hears what it says, and leaves nothing of it behind
results.py    what the runs took, and the table
page.py       the same with a chart, as a page for a browser
__main__.py   the command
"""
