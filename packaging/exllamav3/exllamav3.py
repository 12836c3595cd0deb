"""`import exllamav3` gives exl3. Install this only where ExLlamaV3 itself is not installed."""

from exl3.compat import install_alias

install_alias()
