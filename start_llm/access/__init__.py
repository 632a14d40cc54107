"""Who may ask, and how a request is read before anything looks into it: keys, hosts, tenants, names."""
