"""The model repository: files, loads, unloads and the models that are served."""
