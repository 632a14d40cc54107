"""What the server keeps on disk besides KV: private files, SQLite tables and the threads that write them."""
