"""Test doubles: a scripted policy in place of a real one."""
