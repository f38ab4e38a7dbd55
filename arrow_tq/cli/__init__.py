"""The command ``arrow-tq``. Heavy modules are imported by the commands that use them."""
