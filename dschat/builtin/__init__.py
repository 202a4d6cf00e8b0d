"""The offline demo: tiny model, chat rows, arithmetic, an invented world and its gold scorer."""
