// lock hold|try PATH: gofrs/flock, as lock.py does.
package main

import (
	"fmt"
	"os"
	"time"

	"github.com/gofrs/flock"
)

func main() {
	lock := flock.New(os.Args[2])
	got, err := lock.TryLock()
	if err != nil || !got {
		fmt.Fprintln(os.Stderr, "held", err)
		os.Exit(1)
	}
	if os.Args[1] == "hold" {
		fmt.Println("held")
		time.Sleep(24 * time.Hour)
	}
	lock.Unlock()
}
