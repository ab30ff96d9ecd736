"""The measurements behind `flowkv bench`, one module each; `commands.bench` prints them."""
