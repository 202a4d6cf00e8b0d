"""``python -m dschat.data PATH...``: the command ``dschat.show_data`` under the name of what it is
about. It must not know how: it stands above this layer, since it takes a tokenizer from a model.
"""

from dschat.distributed import entrypoint
from dschat.show_data import main

if __name__ == "__main__":
    entrypoint.run(main)
