"""``gpubridge bench``: measurements that users make on their own machines."""
