"""Interactive chat with a trained model."""

import logging
import os
from typing import TYPE_CHECKING

import dschat.distributed as dist
from dschat.chat.load import PAGE_SIZE, ChatConfig, present

if TYPE_CHECKING:
    from dschat.chat.model import Chat

logger = logging.getLogger("dschat")


def load_chat(config: ChatConfig) -> "Chat":
    """Load the model of ``config`` and return a conversation with it.

    Raises:
        UserError: before weights load, if ``--path`` is not a causal LM with a tokenizer or the
            chat template refuses ``--system``; afterwards, if the weights do not match the model.
    """
    present(config.path)  # before torch loads

    from dschat.chat.model import Chat, Model, check_system

    model = Model.find(config.path, config.dtype, config.trust_remote_code, **config.template_flags)
    # The bytes as typed: in an ASCII locale Python decodes other characters to lone surrogates.
    system = config.system and os.fsencode(config.system).decode("utf-8", "replace")
    check_system(model.tokenizer, system)
    generator = model.generator(page_size=PAGE_SIZE)
    precision = str(model.dtype).removeprefix("torch.")
    logger.info("%s in %s on %s", config.path, precision, dist.device().type)
    return Chat(generator, model.tokenizer, model.stop_ids, config.sampling(), system)
