"""What a row of the command table is made of: which keys arguments name, what has to be in memory, how usage is spelt.

No command lies here, and no client.
"""
