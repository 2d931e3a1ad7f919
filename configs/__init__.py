import sys

from configs import program

program.begin()
if program.starts_train():
    from configs import early

    early.check_call(sys.argv[1:])
