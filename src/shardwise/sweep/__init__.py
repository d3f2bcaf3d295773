"""The jobs of ``-m``: composed and checked by a parent that never trains, and run side by side in fresh processes."""
