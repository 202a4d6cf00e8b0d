"""Builds chat turns and examples."""

from dschat.data.sources.adapters import Example

USER, REPLY, SYSTEM = (
    lambda text, role=role: {"role": role, "content": text}
    for role in ("user", "assistant", "system")
)


HH = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: and?\n\nAssistant:"


def chat(prompt, chosen=None, rejected=None):
    """An example whose prompt is one user turn."""
    answers = (answer and [REPLY(answer)] for answer in (chosen, rejected))
    return Example([USER(prompt)], *answers)
