import sys

from configs import program

program.begin()
if program.starts_train():
    from configs import load

    load.check_call(sys.argv[1:])
