"""Running one model without a server: in the process that the developer started, under any debugger."""
