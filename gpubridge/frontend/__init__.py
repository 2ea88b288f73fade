"""The doors: sockets and the routes behind them."""
