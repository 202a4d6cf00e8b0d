import pytest

from dschat.runtime.deepspeed_engine import unwrap


@pytest.fixture
def kept_gradients():
    """``kept_gradients(engine)``: name -> gradient of the micro-batches since the last step, before
    it is clipped. Without ZeRO.
    """
    handles = []

    def keep(engine):
        kept = {}
        for name, p in unwrap(engine).named_parameters():

            def note(p, name=name):
                kept[name] = p.grad.clone()

            handles.append(p.register_post_accumulate_grad_hook(note))
        return kept

    yield keep
    for handle in handles:
        handle.remove()
