// lock.js hold|try PATH: proper-lockfile, as lock.py does. Its lock is a directory, here at PATH itself.
'use strict';

const lockfile = require('proper-lockfile');

const [verb, path] = process.argv.slice(2);
lockfile.lock(path, { realpath: false, lockfilePath: path }).then(
  async (release) => {
    if (verb === 'hold') {
      console.log('held');
      setInterval(() => {}, 1000);
      return;
    }
    await release();
  },
  (error) => {
    console.error(String(error));
    process.exit(1);
  },
);
