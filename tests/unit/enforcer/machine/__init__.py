"""The whole service in one process: everything outside it is a stand-in that can fail, lie, be late or die."""
