from configs import program

program.begin()
